#include "torch_adapter/shared_texts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace vmm {
namespace {

SharedTexts::Text said(SharedTexts& texts, const std::string& key) {
  return texts.find(key, [&] { return "model: " + key; });
}

TEST(SharedTexts, OfOneKeyAreOneText) {
  SharedTexts texts;
  const SharedTexts::Text first = said(texts, "a");
  EXPECT_EQ(*first, "model: a");
  EXPECT_EQ(said(texts, "a"), first);
  EXPECT_NE(said(texts, "b"), first);
}

TEST(SharedTexts, WhatNobodyHoldsDoesNotStay) {
  SharedTexts texts;
  const SharedTexts::Text held = said(texts, "held");
  for (int k = 0; k < 10000; ++k) {
    EXPECT_EQ(*said(texts, std::to_string(k)), "model: " + std::to_string(k));
    EXPECT_LE(texts.size(), 2 * SharedTexts::kFewest);
  }
  EXPECT_EQ(said(texts, "held"), held);
}

TEST(SharedTexts, WhatIsHeldStays) {
  SharedTexts texts;
  std::vector<SharedTexts::Text> held;
  for (int k = 0; k < 1000; ++k) held.push_back(said(texts, std::to_string(k)));
  EXPECT_EQ(texts.size(), held.size());
  for (int k = 0; k < 1000; ++k) EXPECT_EQ(said(texts, std::to_string(k)), held[static_cast<std::size_t>(k)]);
  held.clear();
  for (int k = 0; k < 2000; ++k) EXPECT_FALSE(said(texts, "other " + std::to_string(k))->empty());
  EXPECT_LE(texts.size(), 2 * SharedTexts::kFewest);
}

}  // namespace
}  // namespace vmm
