"""Replies from outside the controller: of processes, the user's own functions, and a teacher's
server.
"""
