"""Random programs, damaged files and misbehaving ranks: is every answer right, or refused?"""
