"""Experiments whose figures stand in the documentation; each is one command that can be stopped and given again."""
