"""What replies from outside the controller: supervised processes of rewards and environments, the
user's own functions, and a teacher's server.
"""
