"""Runs the stages: the lead, its workers, and what passes between them."""
