#include "cassert"
