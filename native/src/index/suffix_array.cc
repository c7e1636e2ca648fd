#include "index/suffix_array.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace histospec {
namespace {

// A suffix is small (S) if it sorts before its right neighbour, else large (L). A leftmost S (LMS) follows an L.
//
// At most every second suffix is an LMS, so what is computed on the way has room in `order`, in this order of time:
//
//     the LMS, sorted by their substrings | at i / 2: the length, then the name of the LMS substring at i
//     the same                            | free              | the reduced text: these names, in the order of the text
//     the LMS, sorted                     | free              | the LMS, in the order of the text
//
// A branch that depends on the text is often mispredicted. So loops that keep some of many numbers write each of them,
// and overwrite those that they do not keep.
class Sorter {
 public:
  Sorter(std::span<const std::uint32_t> text, std::uint32_t alphabet, std::span<std::uint32_t> order)
      : text_(text),
        order_(order),
        n_(static_cast<std::uint32_t>(text.size())),
        follows_small_(text.size() + 1),
        first_(alphabet + 1, 0),
        edge_(alphabet + 1) {
    for (std::uint32_t c : text_) ++first_[c + 1];
    for (std::uint32_t c = 0; c < alphabet; ++c) first_[c + 1] += first_[c];
    for (std::uint32_t i = n_ - 1; i > 0; --i) {
      const std::uint32_t left = text_[i - 1], right = text_[i];
      follows_small_[i] = left == right ? follows_small_[i + 1] : static_cast<std::uint8_t>(left < right);
    }
    follows_small_[0] = true;  // so that suffix 0 is no LMS
  }

  void run() {
    std::ranges::fill(order_, kFree);
    to_ends();
    for (std::uint32_t i = 0; i < n_; ++i) {
      if (leftmost(i)) order_[--edge_[text_[i]]] = i, ++lms_;
    }
    induce();
    if (lms_ < 2) return;
    sort_lms();
    std::ranges::fill(order_.subspan(lms_), kFree);
    to_ends();
    for (std::uint32_t j = lms_; j-- > 0;) {
      const std::uint32_t i = std::exchange(order_[j], kFree);
      order_[--edge_[text_[i]]] = i;
    }
    induce();
  }

 private:
  static constexpr std::uint32_t kFree = 0;  // suffix 0 induces nothing, so it acts as a free place

  bool leftmost(std::uint32_t i) const { return follows_small_[i] < follows_small_[i + 1]; }
  void to_ends() { std::copy(first_.begin() + 1, first_.end(), edge_.begin()); }

  // The LMS are at the ends of their buckets. Sorts the L suffixes from left to right and the S suffixes from right to
  // left, each from an already placed right neighbour. If the LMS were in any order, they are then sorted by their
  // substrings.
  void induce() {
    std::ranges::copy(first_, edge_.begin());
    order_[edge_[text_[n_ - 1]]++] = n_ - 1;  // the last suffix is L: its right neighbour is empty, the smallest of all
    for (std::uint32_t r = 0; r < n_; ++r) {
      const std::uint32_t i = order_[r];
      if (!follows_small_[i]) order_[edge_[text_[i - 1]]++] = i - 1;
    }
    to_ends();
    follows_small_[0] = false;
    for (std::uint32_t r = n_; r-- > 0;) {
      const std::uint32_t i = order_[r];
      if (follows_small_[i]) order_[--edge_[text_[i - 1]]] = i - 1;
    }
    follows_small_[0] = true;
  }

  // Sorts the LMS to the front. They are among all suffixes, sorted by their substrings.
  void sort_lms() {
    const std::span<std::uint32_t> sorted = order_.first(lms_), reduced = order_.last(lms_);
    std::uint32_t kept = 0;
    for (const std::uint32_t i : order_) {
      order_[kept] = i;
      kept += leftmost(i);
    }
    const std::uint32_t names = name(sorted);
    std::uint32_t first = n_;
    for (std::uint32_t r = n_; r-- > lms_;) {
      const std::uint32_t name = order_[r];
      order_[first - 1] = name;
      first -= name != 0;
    }
    if (names < lms_) {
      suffix_array(reduced, names + 1, sorted);
    } else {
      for (std::uint32_t j = 0; j < lms_; ++j) sorted[reduced[j] - 1] = j;
    }
    kept = 0;
    for (std::uint32_t i = 0; kept < lms_; ++i) {
      reduced[kept] = i;
      kept += leftmost(i);
    }
    for (std::uint32_t& j : sorted) j = reduced[j];
  }

  // Equal LMS substrings get equal names, from 1 in ascending order; 0 where no LMS is. Returns how many names there
  // are.
  std::uint32_t name(std::span<const std::uint32_t> sorted) {
    const std::span<std::uint32_t> of = order_.subspan(lms_);
    std::ranges::fill(of, 0);
    std::uint32_t end = 2 * n_;  // the last substring has no end, so it has a length that no other has
    for (std::uint32_t i = n_; i-- > 0;) {
      if (leftmost(i)) of[i / 2] = std::exchange(end, i) - i + 1;
    }
    std::uint32_t names = 0, before = 0, length_before = 0;
    for (const std::uint32_t i : sorted) {
      const std::uint32_t length = of[i / 2];
      const auto text = text_.begin() + i;
      names += length != length_before || !std::equal(text, text + length, text_.begin() + before);
      of[i / 2] = names;
      before = i, length_before = length;
    }
    return names;
  }

  std::span<const std::uint32_t> text_;
  std::span<std::uint32_t> order_;
  const std::uint32_t n_;
  std::uint32_t lms_ = 0;                    // how many there are
  std::vector<std::uint8_t> follows_small_;  // each suffix: whether its left neighbour is small
  std::vector<std::uint32_t> first_;         // of each bucket; [alphabet] = n
  std::vector<std::uint32_t> edge_;          // where the next suffix of a bucket goes
};

}  // namespace

void suffix_array(std::span<const std::uint32_t> text, std::uint32_t alphabet, std::span<std::uint32_t> order) {
  if (text.empty()) return;
  Sorter(text, alphabet, order).run();
}

}  // namespace histospec
