#include "index/namespace_index.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace histospec {
namespace {

// Text waits until it has kWaitingTokens, or this share of the indexed tokens: smaller segments cost more to follow
// than they help. At first it waits until there is as much as is indexed, at least kFirstTokens, so that the first
// responses of a run draft for its other prompts.
constexpr std::size_t kFirstTokens = 256;
constexpr std::size_t kWaitingTokens = 4096;
constexpr std::size_t kWaitingShare = 16;
constexpr std::size_t kGrowth = 4;
// Up to here it takes all responses of a group: the first epoch of a small run has few other prompts to learn from.
constexpr std::size_t kSmallTokens = 16'384;
// The largest segment is this part of the limit. With one segment for all text, the limit would evict everything at
// once.
constexpr std::size_t kLargestShare = 2;

}  // namespace

bool NamespaceIndex::small() const {
  return segments_->tokens() + waiting_tokens_ < std::min(kSmallTokens, max_tokens_ / kLargestShare);
}

void NamespaceIndex::add(const ResponseView& response) {
  if (max_tokens_ == 0) return;
  ResponseView kept = response;
  kept.head = tail(kept.head);
  waiting_.push_back(owned(kept));
  waiting_tokens_ += response.tokens.size();
}

bool NamespaceIndex::ready() const {
  const std::size_t indexed = segments_->tokens();
  return waiting_tokens_ >= std::max(std::clamp(indexed, kFirstTokens, kWaitingTokens), indexed / kWaitingShare);
}

std::size_t NamespaceIndex::Batch::tokens() const {
  std::size_t n = before->tokens();
  for (const Response& r : fresh) n += r.tokens.size();
  return n;
}

NamespaceIndex::Batch NamespaceIndex::take() {
  waiting_tokens_ = 0;
  return {segments_, std::exchange(waiting_, {})};
}

std::shared_ptr<const Segments> NamespaceIndex::merge(const Batch& batch) const {
  std::vector<ResponseView> views;
  for (const Response& r : batch.fresh) views.push_back(r.view());
  LeftOut evicted;  // stays empty: this index has no window
  auto out = with_responses(*batch.before, views, {std::numeric_limits<int>::max()}, evicted,
                            {kGrowth, max_tokens_ / kLargestShare, 2});
  while (out->tokens() > max_tokens_ && out->size() > 1) out = out->without_oldest();
  return out;
}

void NamespaceIndex::clear() {
  segments_ = std::make_shared<const Segments>();
  waiting_.clear();
  waiting_tokens_ = 0;
}

void NamespaceIndex::publish(const Batch& batch, std::shared_ptr<const Segments> segments) {
  if (segments_ == batch.before) segments_ = std::move(segments);
}

bool NamespaceIndex::shrink() {
  if (segments_->empty() && waiting_.empty()) return false;
  if (segments_->empty()) {
    clear();
  } else {
    segments_ = segments_->without_oldest();
  }
  return true;
}

std::size_t NamespaceIndex::bytes() const {
  return segments_->bytes() + waiting_tokens_ * sizeof(Token) +
         waiting_.size() * (sizeof(Response) + kMaxOrder * sizeof(Token) + 3 * 16);
}

}  // namespace histospec
