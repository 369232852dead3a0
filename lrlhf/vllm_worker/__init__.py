"""What runs inside vLLM's own processes: receiving weights, and guarding the server.

Beside vLLM it imports torch and safetensors only, so that a worker starts without the rest of the
library.
"""
