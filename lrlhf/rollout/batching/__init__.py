"""How rows are cut into minibatches and micro-batches."""
