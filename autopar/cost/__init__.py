"""What things cost: the time of ops, and the whole problem priced in seconds and bytes."""
