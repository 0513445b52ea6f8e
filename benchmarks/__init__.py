"""Measures what the strategies cost in time, on CPUs, against bare torch and Lightning."""
