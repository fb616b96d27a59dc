// The extension module in the layout for the Hugging Face Hub. Loading it registers the operators. It has no attributes
// and no pybind11: it uses only the stable ABI of Python, so that one build serves all releases of Python.
#include <Python.h>
#include <c10/macros/Macros.h>

#define ROPE_INIT_OF(name) PyInit_##name
#define ROPE_INIT(name) ROPE_INIT_OF(name)

PyMODINIT_FUNC ROPE_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, C10_STRINGIZE(TORCH_EXTENSION_NAME), nullptr, 0, nullptr};
  return PyModule_Create(&module);
}
