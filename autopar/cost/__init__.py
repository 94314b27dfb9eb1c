"""The cost model: seconds of ops and collectives, and the optimization problem in seconds and
bytes."""
