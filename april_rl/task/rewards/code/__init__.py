"""The sandbox that runs code of a response, its self-test, and the tests of coding tasks."""
