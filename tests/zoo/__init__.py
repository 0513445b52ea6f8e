"""Ordinary LightningModules, each of which stands for a situation that has broken pipelines before."""
