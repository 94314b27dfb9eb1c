"""Random programs, damaged files and misbehaving ranks. Every answer must be correct or a
refusal."""
