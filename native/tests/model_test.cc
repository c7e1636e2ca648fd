// Runs random bytes and the corpus of the fuzzer through the model.
#include <filesystem>
#include <fstream>
#include <iterator>

#include "engine_model.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;

TEST_CASE("The engine agrees with the model on the corpus of the fuzzer") {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(HISTOSPEC_CORPUS)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    INFO("file ", entry.path().filename().string());
    testing::EngineModel::run({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
    ++files;
  }
  CHECK(files > 0);
}

TEST_CASE("The engine agrees with the model on random operations, with any number of threads") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    testing::Random random(seed);
    std::vector<std::uint8_t> bytes(random.between(100, 3000));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.below(256));
    CAPTURE(seed);
    const std::uint64_t digest = testing::EngineModel::run(bytes);
    // The same calls give the same drafts, and so they do with another number of threads.
    if (seed % 4 == 0) CHECK_EQ(testing::EngineModel::run(bytes), digest);
    if (seed % 4 == 1) CHECK_EQ(testing::EngineModel::run(bytes, 1), testing::EngineModel::run(bytes, 3));
  }
}
