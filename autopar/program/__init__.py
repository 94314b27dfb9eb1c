"""Programs: their data, their execution on one rank, their schedule, the prediction of their
memory, and the lockstep interpreter of all ranks."""
