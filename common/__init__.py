"""What the trainers share."""
