"""Runs to which something happens, as many as asked for; see __main__."""
