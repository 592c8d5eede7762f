"""Prompts in, samples out: the SGLang engines, their client, and generation."""
