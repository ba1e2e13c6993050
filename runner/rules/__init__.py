"""Pure rules: no I/O, no clock, no logging; state and event in, effects or a value out (DESIGN 6)."""
