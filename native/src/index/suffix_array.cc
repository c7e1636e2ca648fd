#include "index/suffix_array.h"

#include <algorithm>
#include <vector>

namespace histospec {
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;

// A suffix is small (S) if it sorts before its right neighbour, else large (L). A leftmost S (LMS) follows an L.
class Sorter {
 public:
  Sorter(std::span<const std::uint32_t> text, std::uint32_t alphabet, std::span<std::uint32_t> order)
      : text_(text),
        order_(order),
        n_(static_cast<std::uint32_t>(text.size())),
        small_(text.size()),
        first_(alphabet + 1, 0),
        edge_(alphabet + 1) {
    for (std::uint32_t c : text_) ++first_[c + 1];
    for (std::uint32_t c = 0; c < alphabet; ++c) first_[c + 1] += first_[c];
    for (std::uint32_t i = n_ - 1; i-- > 0;) {
      small_[i] = text_[i] == text_[i + 1] ? small_[i + 1] : static_cast<std::uint8_t>(text_[i] < text_[i + 1]);
    }
    for (std::uint32_t i = 1; i < n_; ++i) {
      if (leftmost(i)) marks_.push_back(i);
    }
  }

  void run() {
    induce(marks_);
    if (marks_.size() < 2) return;
    std::vector<std::uint32_t> sorted = marks_in_order();
    const std::uint32_t names = name(sorted);
    if (names < sorted.size()) {
      std::vector<std::uint32_t> reduced(marks_.size()), reduced_order(marks_.size());
      for (std::size_t j = 0; j < marks_.size(); ++j) reduced[j] = names_[marks_[j]];
      suffix_array(reduced, names, reduced_order);
      for (std::size_t j = 0; j < marks_.size(); ++j) sorted[j] = marks_[reduced_order[j]];
    }
    induce(sorted);
  }

 private:
  bool leftmost(std::uint32_t i) const { return small_[i] && !small_[i - 1]; }

  // Places the LMS suffixes at the ends of their buckets in the order given, then sorts the L suffixes from left to
  // right and the S suffixes from right to left, each from an already placed right neighbour.
  void induce(const std::vector<std::uint32_t>& lms) {
    std::fill(order_.begin(), order_.end(), kNone);
    std::copy(first_.begin() + 1, first_.end(), edge_.begin());
    for (auto i = lms.rbegin(); i != lms.rend(); ++i) order_[--edge_[text_[*i]]] = *i;
    std::copy(first_.begin(), first_.end(), edge_.begin());
    order_[edge_[text_[n_ - 1]]++] = n_ - 1;  // the last suffix is L: its right neighbour is empty, the smallest of all
    for (std::uint32_t r = 0; r < n_; ++r) {
      const std::uint32_t i = order_[r];
      if (i != kNone && i > 0 && !small_[i - 1]) order_[edge_[text_[i - 1]]++] = i - 1;
    }
    std::copy(first_.begin() + 1, first_.end(), edge_.begin());
    for (std::uint32_t r = n_; r-- > 0;) {
      const std::uint32_t i = order_[r];
      if (i != kNone && i > 0 && small_[i - 1]) order_[--edge_[text_[i - 1]]] = i - 1;
    }
  }

  std::vector<std::uint32_t> marks_in_order() const {
    std::vector<std::uint32_t> sorted;
    sorted.reserve(marks_.size());
    for (std::uint32_t i : order_) {
      if (i != kNone && i > 0 && leftmost(i)) sorted.push_back(i);
    }
    return sorted;
  }

  // Equal LMS substrings get equal names, in ascending order; returns how many names there are.
  std::uint32_t name(const std::vector<std::uint32_t>& sorted) {
    names_.assign(n_, 0);
    std::vector<std::uint32_t> end(n_, n_);  // of the LMS substring that starts here: the next LMS position
    for (std::size_t j = 0; j + 1 < marks_.size(); ++j) end[marks_[j]] = marks_[j + 1];
    std::uint32_t names = 1;
    for (std::size_t j = 1; j < sorted.size(); ++j) {
      names += !same(sorted[j - 1], end[sorted[j - 1]], sorted[j], end[sorted[j]]);
      names_[sorted[j]] = names - 1;
    }
    return names;
  }

  bool same(std::uint32_t a, std::uint32_t a_end, std::uint32_t b, std::uint32_t b_end) const {
    if (a_end == n_ || b_end == n_ || a_end - a != b_end - b) return false;
    return std::equal(text_.begin() + a, text_.begin() + a_end + 1, text_.begin() + b);
  }

  std::span<const std::uint32_t> text_;
  std::span<std::uint32_t> order_;
  const std::uint32_t n_;
  std::vector<std::uint8_t> small_;
  std::vector<std::uint32_t> first_;  // of each bucket; [alphabet] = n
  std::vector<std::uint32_t> edge_;   // where the next suffix of a bucket goes
  std::vector<std::uint32_t> marks_;  // LMS positions, ascending
  std::vector<std::uint32_t> names_;  // of the LMS substring that starts here
};

}  // namespace

void suffix_array(std::span<const std::uint32_t> text, std::uint32_t alphabet, std::span<std::uint32_t> order) {
  if (text.empty()) return;
  Sorter(text, alphabet, order).run();
}

}  // namespace histospec
