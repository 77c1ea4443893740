// Functions of Vec in terms of its other operations, so the same bits in every ISA. Each formula
// stands in common/math.h, which says how far it is off.
inline Vec rsqrt(Vec a) { return Vec(1.0f) / sqrt(a); }
