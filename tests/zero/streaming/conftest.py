from stream_cases import each_device, late

__all__ = ["each_device", "late"]
