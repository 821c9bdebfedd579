"""Plans in launchers' own words: vLLM, SGLang, TensorRT-LLM, llama.cpp and torchrun."""

from foreplan.planner.export.exporter import Exporter, Written, export_plan, targets

__all__ = ["Exporter", "Written", "export_plan", "targets"]
