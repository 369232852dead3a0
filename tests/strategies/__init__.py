"""Tests of lrlhf.strategies."""
