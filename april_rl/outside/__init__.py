"""Supervised processes of rewards and environments, the user's own functions, and a teacher's
server.
"""
