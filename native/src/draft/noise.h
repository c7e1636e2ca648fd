// The noise of coupled sampling: the number that the sampler adds to a token's log-probability, before it takes the
// largest sum. It is a function of the seed, the context and the token, so the engine knows it before the policy
// samples.
//
// This repeats client/vllm/coupled/noise.py and places.py, bit for bit; change them together. Bits come from
// Philox4x32-10 (J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). The logarithms are
// polynomials (S. L. Moshier's Cephes, logf). IEEE 754 rounds each operation, so noise.cc is compiled without fused
// multiply-adds.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "draft/evidence.h"
#include "hash/keyed.h"

namespace histospec {

// What the noise of a token depends on: the two tokens before it, -1 where there is none, and how often this pair
// occurred before in the same text.
struct NoiseContext {
  Token before = -1;
  Token last = -1;
  std::uint32_t times = 0;
};

// Writes the standard Gumbel noise of each token in a context.
void gumbel_noise(std::int64_t seed, const NoiseContext& context, std::span<const Token> tokens,
                  std::span<float, kMaxCandidates> noise);

// The same where vLLM's model runner V2 samples (vllm/v1/worker/gpu/sample/gumbel.py): its noise depends on the
// position of the newest token, counted from the start of the prompt. The kernel's logarithms differ in the last
// digits.
void position_noise(std::int64_t seed, std::uint32_t position, std::span<const Token> tokens,
                    std::span<float, kMaxCandidates> noise);

// How often each pair of neighbouring tokens occurs in a text: a hash table with linear probing.
//
// A slot holds 32 bits of the pair's hash instead of the pair, so that a text takes little of the CPU cache. Pairs with
// equal bits are counted together: about 100 of a million pairs. Then their noise is not the sampler's, and a
// draft may be wrong there.
class PairCounts {
 public:
  std::uint32_t of(Token a, Token b) const { return slots_.empty() ? 0 : slots_[slot_of(hash_of(a, b))].count; }
  // Fetches what of() and add() read into the CPU cache.
  void prefetch(Token a, Token b) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[first_slot(hash_of(a, b))]);
  }
  // May throw std::bad_alloc; then the pair is not counted.
  void add(Token a, Token b) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[slot_of(hash_of(a, b))];
    used_ += slot.count == 0;
    slot.hash = hash_of(a, b);
    ++slot.count;
  }
  std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    std::uint32_t hash = 0;
    std::uint32_t count = 0;  // 0: the slot is free
  };
  static constexpr std::size_t kFirst = 256;

  static std::uint32_t hash_of(Token a, Token b) {
    const std::uint64_t key =
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(a)) << 32 | static_cast<std::uint32_t>(b);
    return static_cast<std::uint32_t>((key * 0x9e3779b97f4a7c15ull) >> 32);
  }
  // Where the search for a hash begins. These bits alone are keyed: which pairs are counted together must not depend on
  // the process.
  std::size_t first_slot(std::uint32_t hash) const { return hash_key.of(hash) & (slots_.size() - 1); }
  std::size_t slot_of(std::uint32_t hash) const {
    const std::size_t mask = slots_.size() - 1;
    std::size_t i = first_slot(hash);
    while (slots_[i].count != 0 && slots_[i].hash != hash) i = (i + 1) & mask;
    return i;
  }
  void grow() {
    PairCounts larger;
    larger.slots_.resize(slots_.empty() ? kFirst : 2 * slots_.size());
    for (const Slot& slot : slots_) {
      if (slot.count != 0) larger.slots_[larger.slot_of(slot.hash)] = slot;
    }
    slots_.swap(larger.slots_);
  }

  std::vector<Slot> slots_;
  std::size_t used_ = 0;
};

// Counts how many tokens of a text follow each pair. A text begins with its prompt.
class NoiseCounter {
 public:
  // The two newest tokens of the text; -1 where there is none.
  Token before() const { return before_; }
  Token last() const { return last_; }
  // How many tokens follow this pair.
  std::uint32_t times(Token before, Token last) const { return seen_.of(before, last); }
  // Prepares to push these tokens a little later.
  void prefetch(Tokens tokens) const {
    Token before = before_, last = last_;
    for (Token token : tokens) {
      seen_.prefetch(before, last);
      before = last;
      last = token;
    }
  }
  // Prepares to ask for this pair a little later.
  void prefetch(Token before, Token last) const { seen_.prefetch(before, last); }
  // May throw std::bad_alloc; then the token is not counted.
  void push(Token token) {
    seen_.add(before_, last_);
    before_ = last_;
    last_ = token;
  }
  std::size_t bytes() const { return seen_.bytes(); }

 private:
  PairCounts seen_;
  Token before_ = -1, last_ = -1;
};

// The noise along a draft. With a counter, the draft begins where its text ends, and the text must not change
// meanwhile.
class NoiseAhead {
 public:
  // For noise of the position. `position`: of the newest token of the text.
  void start(std::int64_t seed, std::int64_t position) {
    of_position_ = true;
    seed_ = seed;
    position_ = static_cast<std::uint32_t>(position);
  }
  void start(std::int64_t seed, const NoiseCounter& text) {
    text_ = &text;
    seed_ = seed;
    tokens_.assign({text.before(), text.last()});
  }
  // Whether it was started, so that the noise is known.
  bool known() const { return of_position_ || text_ != nullptr; }
  // Writes the noise of these candidates for the next token.
  void of(std::span<const Token> tokens, std::span<float, kMaxCandidates> noise) const {
    if (of_position_) {
      position_noise(seed_, position_, tokens, noise);
    } else {
      gumbel_noise(seed_, next(), tokens, noise);
    }
  }
  // The context of the next token.
  NoiseContext next() const {
    const Token before = tokens_.end()[-2], last = tokens_.end()[-1];
    std::uint32_t times = text_->times(before, last);
    for (std::size_t i = 2; i < tokens_.size(); ++i) times += tokens_[i - 2] == before && tokens_[i - 1] == last;
    return {before, last, times};
  }
  void push(Token token) {
    ++position_;
    if (text_ == nullptr) return;
    text_->prefetch(tokens_.back(), token);
    tokens_.push_back(token);
  }

 private:
  const NoiseCounter* text_ = nullptr;
  bool of_position_ = false;
  std::uint32_t position_ = 0;
  std::int64_t seed_ = 0;
  std::vector<Token> tokens_;  // the two newest of the text, and those of the draft
};

}  // namespace histospec
