"""Running a program: the module, its parameters, process groups, memory, and the lockstep
interpreter."""
