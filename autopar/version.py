"""The version of this package; setup.cfg reads it."""

VERSION = "0.1.0"
