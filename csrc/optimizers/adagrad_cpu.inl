// Adagrad on the CPU; compiled once per ISA.
#include "optimizers/adagrad_math.inl"
#include "optimizers/step_cpu.inl"
