"""The policy in Megatron-core: model, optimizer step, state on disk."""
