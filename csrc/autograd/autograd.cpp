// Compiles all derivatives as one file, because torch's headers take longer to compile than the derivatives.
#include "in_place.inc"
#include "norm.inc"
#include "rotation.inc"
#include "tables.inc"
