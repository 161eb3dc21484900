"""Helpers shared by the trainers: Atari environments, a vector environment, prioritised sampling."""
