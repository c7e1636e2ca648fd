#include "draft/noise.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace histospec {
namespace {

static_assert(kMaxCandidates == 4);
using Floats [[gnu::vector_size(16)]] = float;
using Bits [[gnu::vector_size(16)]] = std::int32_t;

constexpr std::uint32_t kQuarter = 256;  // counters of a tile; it has four times as many tokens
constexpr int kRounds = 10;

// log(1 + f) = f - f²/2 + f³ * polynomial(f), the highest power first.
constexpr std::array<float, 9> kPolynomial = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                              -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                              2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
constexpr float kLn2Low = -2.12194440e-4f, kLn2High = 0.693359375f;  // their sum is ln 2
constexpr float kHalfRoot = 0.707106781186547524f;
constexpr float kNearOne = 0.25f;  // below, 1 - u has lost digits of u

// A number as (1 + f) * 2^exponent, with 1 + f between the square roots of 1/2 and 2.
struct Split {
  Floats f, exponent;
};

Floats choose(const Bits& mask, const Floats& yes, const Floats& no) {
  return reinterpret_cast<Floats>((mask & reinterpret_cast<Bits>(yes)) | (~mask & reinterpret_cast<Bits>(no)));
}

Split split(const Floats& x) {
  const auto bits = reinterpret_cast<Bits>(x);
  const Bits exponent = (bits >> 23) - 126;
  const auto mantissa = reinterpret_cast<Floats>((bits & 0x7fffff) | 0x3f000000);
  const Bits small = mantissa < kHalfRoot;  // -1 where true
  return {choose(small, mantissa + mantissa, mantissa) - 1.0f, __builtin_convertvector(exponent + small, Floats)};
}

Floats log(const Split& x) {
  const Floats square = x.f * x.f;
  Floats y = kPolynomial[0] - Floats{};
  for (std::size_t i = 1; i < kPolynomial.size(); ++i) y = y * x.f + kPolynomial[i];
  y = y * x.f * square;
  y = y + x.exponent * kLn2Low;
  y = y - 0.5f * square;
  return x.f + y + x.exponent * kLn2High;
}

// A word of each of four counters.
using Words = std::array<std::uint32_t, kMaxCandidates>;

// -log(-log(1 - u)) with u = (word + 1/2) / 2^32.
Floats gumbel(const Words& words) {
  Floats u, rest;
  for (int i = 0; i < 4; ++i) {
    u[i] = (static_cast<float>(words[i]) + 0.5f) * 0x1p-32f;
    rest[i] = (static_cast<float>(~words[i]) + 0.5f) * 0x1p-32f;
  }
  const Bits near = u < kNearOne;
  const Split far = split(rest);
  return -log(split(-log({choose(near, -u, far.f), choose(near, Floats{}, far.exponent)})));
}

// Philox4x32-10 of the first counters.
template <std::size_t kCounters>
void philox(std::array<Words, 4>& c, std::int64_t seed) {
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < kCounters; ++i) {
      const std::uint64_t first = 0xd2511f53ull * c[0][i], second = 0xcd9e8d57ull * c[2][i];
      c[0][i] = static_cast<std::uint32_t>(second >> 32) ^ c[1][i] ^ k0;
      c[1][i] = static_cast<std::uint32_t>(second);
      c[2][i] = static_cast<std::uint32_t>(first >> 32) ^ c[3][i] ^ k1;
      c[3][i] = static_cast<std::uint32_t>(first);
    }
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
}

// MurmurHash3 of 16 bytes: the seed, the position and the token (A. Appleby, 2011).
std::uint32_t murmur(std::int64_t seed, std::uint32_t position, std::uint32_t token) {
  std::uint32_t h = 0;
  for (std::uint32_t word :
       {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), position, token}) {
    h ^= std::rotl(word * 0xcc9e2d51u, 15) * 0x1b873593u;
    h = std::rotl(h, 13) * 5 + 0xe6546b64u;
  }
  h ^= 16;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

}  // namespace

void position_noise(std::int64_t seed, std::uint32_t position, std::span<const Token> tokens,
                    std::span<float, kMaxCandidates> noise) {
  Words words{};
  for (std::size_t i = 0; i < std::min<std::size_t>(tokens.size(), kMaxCandidates); ++i) {
    words[i] = murmur(seed, position, static_cast<std::uint32_t>(tokens[i]));
  }
  const Floats all = gumbel(words);
  std::memcpy(noise.data(), &all, sizeof(all));
}

void gumbel_noise(std::int64_t seed, const NoiseContext& context, std::span<const Token> tokens,
                  std::span<float, kMaxCandidates> noise) {
  std::array<Words, 4> counters;
  counters[0].fill(0);
  counters[1].fill(static_cast<std::uint32_t>(context.last));
  counters[2].fill(static_cast<std::uint32_t>(context.before));
  counters[3].fill(context.times);
  Words which{}, words;
  for (std::size_t i = 0; i < std::min<std::size_t>(tokens.size(), kMaxCandidates); ++i) {
    const auto token = static_cast<std::uint32_t>(tokens[i]);
    const std::uint32_t tile = token / (4 * kQuarter), within = token % (4 * kQuarter);
    counters[0][i] = tile * kQuarter + within % kQuarter;
    which[i] = within / kQuarter;
  }
  switch (tokens.size()) {
    case 1:
      philox<1>(counters, seed);
      break;
    case 2:
      philox<2>(counters, seed);
      break;
    case 3:
      philox<3>(counters, seed);
      break;
    default:
      philox<kMaxCandidates>(counters, seed);
  }
  for (std::size_t i = 0; i < kMaxCandidates; ++i) words[i] = counters[which[i]][i];
  const Floats all = gumbel(words);
  std::memcpy(noise.data(), &all, sizeof(all));
}

}  // namespace histospec
