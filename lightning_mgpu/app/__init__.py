"""Programs for the command line: training by configuration, and the demonstration."""
