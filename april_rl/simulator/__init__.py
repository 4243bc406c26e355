"""What a run would do elsewhere: the production collector, simulated engines, a virtual clock."""
