"""What keeps an attempt alive and ends it in order: the batch host's supervisor and one agent a node. No torch."""
