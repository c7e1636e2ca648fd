// The namespace index: what any problem of the namespace has written, for contexts that a problem's own history does
// not know (its first epoch, tool calls and other text that problems share).
//
// Segments as everywhere, over one response of each group that arrives: siblings are near copies of each other, and
// what problems share, one of them shows. New text waits until there is enough of it for a segment; segments are merged
// up to half the limit, so that few remain to be followed; the oldest go when all are larger than the limit.
//
// Threads: none of its own. The engine's lock guards it; merging happens outside of it.
#pragma once

#include <memory>
#include <vector>

#include "index/segments.h"

namespace histospec {

class NamespaceIndex {
 public:
  explicit NamespaceIndex(std::size_t max_tokens) : max_tokens_(max_tokens) {}

  // Whether so many tokens more leave it within one part in so many of its limit.
  bool has_room(std::size_t tokens, std::size_t part) const { return held_tokens() + tokens <= max_tokens_ / part; }
  // Keeps a copy of the text. True when there is enough for take().
  bool add(const ResponseView& response);

  // In three moves, so that the slow one needs no lock: take() under the lock, merge() without, publish() under it.
  // One at a time.
  struct Batch {
    std::shared_ptr<const Segments> before;
    std::vector<Response> fresh;

    std::size_t tokens() const;
  };
  Batch take();
  std::shared_ptr<const Segments> merge(const Batch& batch) const;
  // Does nothing if the index was cleared or shrunk since take().
  void publish(const Batch& batch, std::shared_ptr<const Segments> merged);
  void clear();
  // Gives up the oldest segment, or, when there is none, what waits for one. False when there was nothing.
  bool shrink();

  const std::shared_ptr<const Segments>& segments() const { return segments_; }
  std::size_t bytes() const;

 private:
  std::size_t indexed_tokens() const;
  std::size_t held_tokens() const { return indexed_tokens() + waiting_tokens_; }
  void replace(std::shared_ptr<const Segments> segments);

  const std::size_t max_tokens_;
  std::shared_ptr<const Segments> segments_ = std::make_shared<const Segments>();
  std::vector<Response> waiting_;
  std::size_t waiting_tokens_ = 0;
  std::size_t segment_bytes_ = 0;
};

}  // namespace histospec
