"""Reward models, PPO and RLOO from human feedback, as PyTorch Lightning modules."""
