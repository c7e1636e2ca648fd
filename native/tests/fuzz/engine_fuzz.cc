#include "engine_model.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  histospec::testing::EngineModel::run({data, size});
  return 0;
}
