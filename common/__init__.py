"""What the trainers share: command line, runs, environments, processes and replay memory."""
