"""Publishing the trainer's weights to the engines."""
