"""What lets vLLM's GPU features run on CPUs; installed by `worker_extension.enter_engine_process`, `fp8` by `launch`."""
