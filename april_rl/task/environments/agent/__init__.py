"""Agents: programs that ask the policy through OpenAI's API (HTTP), as environments."""
