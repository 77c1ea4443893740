// Lion on the CPU; compiled once per ISA.
#include "optimizers/lion_math.inl"
#include "optimizers/step_cpu.inl"
