"""Code inside vLLM's processes: the receiver of weights, and the guard of the server.

Besides vLLM it imports torch and safetensors only, so that workers start fast.
"""
