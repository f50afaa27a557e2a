"""What no hook of vLLM allows: each patch a record and a pointer; the logic lives in bole_vllm."""
