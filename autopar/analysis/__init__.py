"""Properties of ops and graphs that do not depend on the machine: work, memory, gradients and
microbatches."""
