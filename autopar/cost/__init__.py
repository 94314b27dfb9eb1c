"""The cost model: seconds of ops and collectives, and the whole problem priced in seconds and
bytes."""
