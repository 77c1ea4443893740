from stream_cases import each_device, each_rest, late

__all__ = ["each_device", "each_rest", "late"]
