"""What a user can ask for: cluster profiles, run profiles, and how they are read."""
