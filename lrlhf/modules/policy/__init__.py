"""The parts of a policy gradient iteration: sampler, scorer, objective, updater."""
